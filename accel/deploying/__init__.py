"""What runs models elsewhere: files that another server reads.

In: an artifact and where it is to run. Out: a folder that the server loads, and findings about such folders. The next target is
a package here, named after its server.
"""
