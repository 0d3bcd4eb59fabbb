// Dots of codes and int8 inputs for instruction sets that multiply bytes to pairs' sums in int16:
// `multiply_pairs(unsigned, signed)`, `add_shorts`, `sum_pairs` (of int16 products, in int32).
//
// Codes of 0 to 15 keep int16 from overflowing: 32 inputs are eight sums of 2 * 15 * 127. Codes of 8
// bits are two of those.

template <int Bits>
struct Dot;

template <>
struct Dot<4> {
  Ints sums;

  void start(int32_t) { sums = Ints{}; }
  void add(Ints codes, const int32_t* inputs) {
    sums = add_shorts(sums, multiply_pairs(codes, Ints{} + *inputs));
  }
  Ints total(int32_t surplus) const { return sum_pairs(sums, Ints{} + 0x00010001) + surplus; }
  // Of code - zero; negative: minus the sum of all inputs, in the lower half of each lane.
  Ints total(int32_t surplus, Ints zero, const int32_t* negative) const {
    return total(surplus) + sum_pairs(zero, Ints{} + *negative);
  }
};

template <>
struct Dot<8> {
  struct Codes {
    Ints low, high;
  };
  Dot<4> low, high;

  static Codes codes(Ints stored) { return {stored & 0x0F0F0F0F, stored >> 4 & 0x0F0F0F0F}; }
  void start(int32_t surplus) {
    low.start(surplus);
    high.start(surplus);
  }
  void add(Codes codes, const int32_t* inputs) {
    low.add(codes.low, inputs);
    high.add(codes.high, inputs);
  }
  Ints total(int32_t surplus) const {
    return low.total(surplus) + sum_pairs(high.sums, Ints{} + 0x00100010);
  }
  Ints total(int32_t surplus, Ints zero, const int32_t* negative) const {
    return total(surplus) + sum_pairs(zero, Ints{} + *negative);
  }
};
