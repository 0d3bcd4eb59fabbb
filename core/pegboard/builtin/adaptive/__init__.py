"""The speculation policy `adaptive`: as many drafts as pay."""
