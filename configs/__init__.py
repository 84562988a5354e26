"""The configuration of a deployment: schema, loader and examples."""
