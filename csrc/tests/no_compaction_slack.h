// Compaction of tables that are too small for it.
#pragma once

#include "store/compactor.h"

namespace bunkbed::test {

// The compactor leaves no dead bytes alone while this lives.
struct NoCompactionSlack {
  NoCompactionSlack() { compaction_slack_bytes = 0; }
  ~NoCompactionSlack() { compaction_slack_bytes = before; }
  const uint64_t before = compaction_slack_bytes;
};

}  // namespace bunkbed::test
