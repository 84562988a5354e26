"""Sampling and unmasking rules, as pure functions on logits."""
