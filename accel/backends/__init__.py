"""Find and choose a backend, and open a model's sessions.

In: a resolved model and the user's settings. Out: a plan with reasons, and its open sessions. Code for all
backends belongs in this package; code for one backend belongs in its plugin.
"""
