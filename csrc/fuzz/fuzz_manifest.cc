#include "fuzz/targets.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  bunkbed::fuzz::manifest(data, size);
  return 0;
}
