"""Deploy models to other inference servers: write the files that a server reads.

In: an artifact, and the settings of the server and the device. Out: a folder that the server loads. A check reports findings about
existing folders. Each target server has a subpackage with its name.
"""
