#pragma once

#include <vector>

#include "autograd/tensor.h"

// Note: Joined tensors
// The projections of one input (queries, keys and values) have weights that lie one after another in memory, so that all of them are
// one product with one wide matrix; what it gives is cut into columns, and their gradients are made side by side again. Whether
// tensors lie like that is seen from their geometry: nothing is marked, and everything works where they do not.

namespace heddle {

// The matrix whose rows are those of `parts` in order, or the vector of their elements: a view of their memory. Undefined unless
// they are dense, of one dtype and follow each other in one storage.
Tensor joined_rows(const std::vector<Tensor>& parts);

// The same for matrices [rows, columns] that are neighbouring columns of one.
Tensor joined_columns(const std::vector<Tensor>& parts);

// New tensors of the shapes of `parts`, which are [B, S, H, D]: cut from one buffer exactly when these are neighbouring heads in one.
std::vector<Tensor> empty_like_heads(const std::vector<Tensor>& parts);

}  // namespace heddle
