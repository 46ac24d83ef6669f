"""Interfaces for authors of backends, tasks and families: protocols, data classes, and the checks that all sessions share.

In: the declarations of installed plugins. Out: tasks and families, found by name in registries. All sessions make the
same checks and raise the same errors.
"""
