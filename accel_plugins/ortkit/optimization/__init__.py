"""Rewrites of graphs into faster ones, the table that names them, and half precision."""
