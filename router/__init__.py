"""Placement of batches on replicas."""
