"""Ray: the same application and engine on several processes and machines.

`cluster` joins or starts a cluster, `deploying` puts the server on it as a Ray Serve application. Nothing else imports ray, which is an
extra of its own.
"""
