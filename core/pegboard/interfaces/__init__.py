"""The contracts of the engine, one file each: an abstract class, its data, its promises.

An interface file states the version of its contract as `VERSION`; 0 is provisional: it has no second
implementation yet and may change in any release.
"""
