// What the library offers to Python.
#pragma once

#define PEGBOARD_API extern "C" __attribute__((visibility("default")))
