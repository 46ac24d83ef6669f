"""Deploy models to other inference servers: write the files that a server reads.

In: an artifact and the target (server, device and settings). Out: a folder that the server loads, and findings about such folders. Each
target server has its own package here, named after the server.
"""
