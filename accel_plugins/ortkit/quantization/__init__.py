"""Quantization of graphs: integer products, Q/DQ pairs, block-wise weights, and calibration."""
