"""Decoders by configuration: described without torch, built with it, a file a family."""
