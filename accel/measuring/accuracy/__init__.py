"""Accuracy: metrics, predictions on labelled rows, and how sure a difference is."""
