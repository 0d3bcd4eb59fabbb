"""Beginnings of sequences whose KV is known: which blocks hold them, who may begin with them, and what
the prefix cache is asked and told."""
