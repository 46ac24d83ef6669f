"""Offline inference: every row of a table through an engine, each exactly once, whatever kills it on the way.

`answers` says which columns an operation's answers become, `parts` computes some consecutive rows into one file, `ledger` knows what is
done, `running` does the rest in this process, and `on_ray` has Ray's actors compute the parts.
"""
