"""The plugin host: what is installed, what goes together, and the objects made of it.

A plugin's way through the files: `discovery` finds it and reads its manifest without importing it,
`resolver` chooses, `composition` is what was chosen, `loader` imports and registers it, `registry`
makes objects by its factories.
"""
