"""Architecture families: what is particular to the models of one family, one module each."""
