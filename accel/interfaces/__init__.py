"""What an author of a backend, a task or a family imports: protocols, specs, and the session contract as functions.

In: what a part declares. Out: the part of a name, and the same checks and errors for all of them.
"""
