"""What `pegboard eval` measures: how two configs predict a text, generate, and use memory and time."""
