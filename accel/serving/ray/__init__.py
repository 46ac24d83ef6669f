"""Run the HTTP server on a Ray cluster, in several processes and on several machines.

`cluster` joins or starts a cluster. `ray_deployment` runs the server on it as a Ray Serve application. Ray is an optional
dependency: `import accel` does not import it.
"""
