// Which rows two batches have in common: what a copy of one batch's rows must be given anew once the other was stepped.
#pragma once

#include "batch/batch.h"

namespace bunkbed {

// in_other[i]: whether batch.unique()[i] is a row of `other` too. Time and memory follow the two batches.
void rows_in_other(const Batch& batch, const Batch& other, bool* in_other);

}  // namespace bunkbed
