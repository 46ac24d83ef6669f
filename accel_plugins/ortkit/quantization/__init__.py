"""Graphs with fewer bits: integer products, Q/DQ pairs, weights in blocks, and their calibration."""
