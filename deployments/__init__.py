"""The Serve application: ingress, batching, admission and autoscaling."""
