#include "tensor/chunks.hpp"

#include <ATen/ops/cat.h>

#include <algorithm>
#include <vector>

#include "nanlocator/scan/fingerprint.hpp"
#include "tensor/tensor_access.hpp"

namespace nanlocator::inline tensor_room {
namespace {

/// Calls `visit(run)` for consecutive views in row-major order, of at most `most` elements each.
template <class Visit>
void for_each_run(const at::Tensor& tensor, std::int64_t most, const Visit& visit) {
  if (tensor.numel() <= most) return visit(tensor);
  const std::int64_t inner = tensor.numel() / tensor.size(0);
  const std::int64_t step = std::max<std::int64_t>(1, most / inner);
  for (std::int64_t begin = 0; begin < tensor.size(0); begin += step) {
    if (inner > most) {
      for_each_run(tensor.select(0, begin), most, visit);
    } else {
      visit(tensor.narrow(0, begin, std::min(step, tensor.size(0) - begin)));
    }
  }
}

/// Joins runs to chunks of `size` bytes.
class ChunkBuilder {
 public:
  ChunkBuilder(std::int64_t size, const std::function<void(const at::Tensor&)>& visit)
      : size_(size), visit_(visit) {}

  void add(const at::Tensor& bytes) {
    for (std::int64_t begin = 0; begin < bytes.numel();) {
      const std::int64_t count = std::min(size_ - filled_, bytes.numel() - begin);
      pieces_.push_back(bytes.narrow(0, begin, count));
      filled_ += count;
      begin += count;
      if (filled_ == size_) flush();
    }
  }
  void flush() {
    if (pieces_.empty()) return;
    visit_(at::cat(pieces_));
    pieces_.clear();
    filled_ = 0;
  }

 private:
  std::int64_t size_;
  const std::function<void(const at::Tensor&)>& visit_;
  std::vector<at::Tensor> pieces_;
  std::int64_t filled_ = 0;
};

}  // namespace

void for_each_chunk(const at::Tensor& tensor, std::int64_t most,
                    const std::function<void(const at::Tensor&, std::int64_t)>& visit) {
  if (tensor.numel() == 0) return;
  if (tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg()) {
    const auto flat = as_real(tensor).view(-1);
    for (std::int64_t first = 0; first < flat.numel(); first += most) {
      visit(flat.narrow(0, first, std::min(most, flat.numel() - first)), first);
    }
    return;
  }
  const auto dtype = c10::toRealValueType(tensor.scalar_type());
  const auto element_bytes = static_cast<std::int64_t>(c10::elementSize(dtype));
  std::int64_t first = 0;
  const std::function<void(const at::Tensor&)> visit_bytes = [&](const at::Tensor& bytes) {
    const auto chunk = bytes.view(dtype);
    visit(chunk, first);
    first += chunk.numel();
  };
  ChunkBuilder chunks(most * element_bytes, visit_bytes);
  for_each_run(tensor, most, [&](const at::Tensor& run) {
    chunks.add(as_real(run).contiguous().view(-1).view(at::kByte));
  });
  chunks.flush();
}

void add_part(TensorStats& total, const TensorStats& part, std::int64_t first,
              std::size_t element_bytes) {
  total.numel += part.numel;
  total.nan += part.nan;
  total.pos_inf += part.pos_inf;
  total.neg_inf += part.neg_inf;
  total.zeros += part.zeros;
  if (total.first_bad < 0 && part.first_bad >= 0) total.first_bad = first + part.first_bad;
  total.finite_min = std::min(total.finite_min, part.finite_min);
  total.finite_max = std::max(total.finite_max, part.finite_max);
  total.absmin = std::min(total.absmin, part.absmin);
  total.absmax = std::max(total.absmax, part.absmax);
  total.sum_of_squares += part.sum_of_squares;
  const auto first_word =
      static_cast<std::uint32_t>(static_cast<std::uint64_t>(first) * element_bytes / 4);
  total.fingerprint =
      add_fingerprints(total.fingerprint, shift_fingerprint(part.fingerprint, first_word));
}

}  // namespace nanlocator::inline tensor_room
