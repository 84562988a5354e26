"""Tensor parallelism: ranks, their collectives, and the processes that run them."""
