"""What a plugin's author imports, and how a backend is found, chosen and opened.

In: an artifact and what the user asked for. Out: its open sessions, and the reasons for the choice. `specs`, `interfaces`
and `checks` are the plugin interface; what belongs to every backend alike goes here, what belongs to one into its plugin.
"""
