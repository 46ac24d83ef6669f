"""Accuracy: metrics, predictions on labelled rows, and confidence intervals of differences between models."""
