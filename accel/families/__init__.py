"""Architecture families: what is particular to the models of one family, one module each, where the general way is wrong.

In: a model, and what capture made for it. Out: the same, changed for the family.
"""
