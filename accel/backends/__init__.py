"""How a backend is found and chosen, and how a model's sessions are opened.

In: a model that was found, and what the user asked for. Out: a plan with its reasons, and its open sessions. What belongs to
every backend goes
here, what belongs to one into its plugin.
"""
