"""Interfaces for authors of backends, tasks and families: protocols, specs, and the session contract as functions."""
