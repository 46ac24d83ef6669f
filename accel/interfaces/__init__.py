"""Interfaces for authors of backends, tasks and model families: protocols, data classes, registries and checks.

In: the entry points of installed plugins, and the inputs of calls. Out: backends, tasks and families by name, and checked inputs.
The checks of inputs are shared, so that the sessions of all backends raise the same errors.
"""
