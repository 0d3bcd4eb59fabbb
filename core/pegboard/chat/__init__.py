"""Conversations to prompts: a checkpoint's chat template, run where it can do no harm."""
