"""The memory ledger: what a composition takes, by name, before anything is loaded."""
