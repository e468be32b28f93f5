#include "fuzz/targets.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  bunkbed::fuzz::table(data, size);
  return 0;
}
