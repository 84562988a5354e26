"""Engines that run language models, and the Serve deployment around them."""
