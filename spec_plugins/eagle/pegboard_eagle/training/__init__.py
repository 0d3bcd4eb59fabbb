"""Trains a head for a model: `pegboard train-eagle`."""
