"""Deploy models to other inference servers: write the files that a server reads.

In: an artifact and the target (server, device and settings). Out: a folder that the server loads, and findings about existing folders. Each
target server has a subpackage with its name.
"""
