// All operations for the vector type `Vec` of the file that includes this, within its namespace.

#include "math.inl"

#include "elementwise.inl"
#include "attention_codes.inl"
#include "attention_tiles.inl"
#include "attention.inl"
#include "linear.inl"
#include "codes.inl"
#include "w8a8.inl"
#include "float8.inl"
#include "sample.inl"
