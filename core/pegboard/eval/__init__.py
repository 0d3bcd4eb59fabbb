"""The measurements of `pegboard eval`: how two configs predict a text and generate; memory and time."""
