"""Load tests; they speak HTTP only."""
