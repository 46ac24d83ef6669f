"""Deploy models to other inference servers: write the files that a server reads.

A deployment writes a folder that the server loads, from an artifact and the settings of the server and the device. A check reports findings
about existing folders. Each target server has a subpackage with its name.
"""
