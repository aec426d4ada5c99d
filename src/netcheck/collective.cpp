#include "netcheck/collective.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cmath>
#include <limits>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "netcheck/torch_versions.hpp"

namespace nanlocator::netcheck {
namespace {

using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

constexpr double kPoison = -1;  // not a value of any case
constexpr int kValues = 120;    // the sum of two is below 256

int value_of(const CollectiveCase& c, int sender, std::int64_t index) {
  return 1 + static_cast<int>((index * 7 + sender * 31 + c.seed * 13) % kValues);
}

bool reduces(const CollectiveCase& c) {
  return c.collective == Collective::all_reduce || c.collective == Collective::reduce_scatter;
}

bool is_in_place(const CollectiveCase& c) {
  return c.collective == Collective::all_reduce || c.collective == Collective::broadcast;
}

// The first contributor to an element of a reduction; in every other round of ranks the only one.
int first_contributor(const CollectiveCase& c, std::int64_t element) {
  return static_cast<int>(element % c.size);
}
int second_contributor(const CollectiveCase& c, std::int64_t element) {
  const auto round = element / c.size;
  if (round % 2 == 0 || c.size < 2) return first_contributor(c, element);
  return static_cast<int>((element + 1 + (round / 2) % (c.size - 1)) % c.size);
}

std::int64_t nan_element(const CollectiveCase& c) {
  return c.seed % c.numel;
}

std::int64_t part(const CollectiveCase& c) {
  return c.numel / c.size;
}

int previous(const CollectiveCase& c) {
  const int step = c.collective == Collective::send_recv ? c.size - 1 : 1;
  return (c.rank + step) % c.size;
}
int next(const CollectiveCase& c) {
  const int step = c.collective == Collective::send_recv ? 1 : c.size - 1;
  return (c.rank + step) % c.size;
}

// One element of this rank's output: its sender, and its index there.
struct Source {
  std::int64_t element = 0;
  int sender = 0;          // unless it is a reduction
  std::int64_t index = 0;  // in that sender's input
};

Source source_of(const CollectiveCase& c, std::int64_t index) {
  switch (c.collective) {
    case Collective::all_reduce:
      return {index, 0, index};
    case Collective::reduce_scatter:
      return {c.rank * part(c) + index, 0, index};
    case Collective::all_gather:
      return {index, static_cast<int>(index / part(c)), index % part(c)};
    case Collective::broadcast:
      return {index, c.root, index};
    case Collective::all_to_all: {
      const auto sender = static_cast<int>(index / part(c));
      return {c.rank * c.numel + index, sender, c.rank * part(c) + index % part(c)};
    }
    case Collective::send_recv:
    case Collective::send_recv_reverse:
      return {c.rank * c.numel + index, previous(c), index};
  }
  return {};
}

// The place of the case's one NaN: (sender, index in its input); in a reduction, the first
// contributor's.
Source nan_source(const CollectiveCase& c) {
  const auto element = nan_element(c);
  if (reduces(c)) return {element, first_contributor(c, element), element};
  if (c.collective == Collective::all_gather) {
    return {element, static_cast<int>(element / part(c)), element % part(c)};
  }
  const int sender = c.collective == Collective::broadcast ? c.root : c.seed % c.size;
  return {element, sender, element};
}

double expected_value(const CollectiveCase& c, std::int64_t index) {
  const auto source = source_of(c, index);
  const auto nan = c.carries_nan ? nan_source(c) : Source{.sender = -1};
  if (!reduces(c)) {
    if (nan.sender == source.sender && nan.index == source.index) return NAN;
    return value_of(c, source.sender, source.index);
  }
  if (c.carries_nan && nan.index == source.element) return NAN;
  const int first = first_contributor(c, source.element);
  const int second = second_contributor(c, source.element);
  const int sum = value_of(c, first, source.element);
  return first == second ? sum : sum + value_of(c, second, source.element);
}

template <typename Function>
at::Tensor filled(std::int64_t numel, at::ScalarType dtype, const Function& value) {
  auto numbers = at::empty({numel}, at::TensorOptions().dtype(at::kFloat));
  float* const data = numbers.data_ptr<float>();
  for (std::int64_t i = 0; i < numel; ++i) data[i] = static_cast<float>(value(i));
  return numbers.to(dtype);
}

std::int64_t input_numel(const CollectiveCase& c) {
  return c.collective == Collective::all_gather ? part(c) : c.numel;
}

std::int64_t output_numel(const CollectiveCase& c) {
  return c.collective == Collective::reduce_scatter ? part(c) : c.numel;
}

std::set<int> all_members(const CollectiveCase& c) {
  std::set<int> members;
  for (int rank = 0; rank < c.size; ++rank) members.insert(rank);
  return members;
}

ExpectedElement expected_element(const CollectiveCase& c, std::int64_t index) {
  const auto source = source_of(c, index);
  ExpectedElement expected{.value = expected_value(c, index)};
  if (reduces(c)) {
    expected.senders = {first_contributor(c, source.element),
                        second_contributor(c, source.element)};
  } else {
    expected.senders = {source.sender};
  }
  const bool all_receive = is_in_place(c) || c.collective == Collective::all_gather;
  expected.receivers = all_receive ? all_members(c) : std::set<int>{c.rank};
  return expected;
}

}  // namespace

std::string_view name_of(Collective collective) noexcept {
  static constexpr std::array<std::string_view, 7> names = {
      "all_reduce", "reduce_scatter", "all_gather",       "broadcast",
      "all_to_all", "send_recv",      "send_recv_reverse"};
  return names[static_cast<std::size_t>(collective)];
}

double bus_factor(const CollectiveCase& c) {
  const double others = static_cast<double>(c.size - 1) / c.size;
  switch (c.collective) {
    case Collective::all_reduce:
      return 2 * others;
    case Collective::reduce_scatter:
    case Collective::all_gather:
    case Collective::all_to_all:
      return others;
    default:
      return 1;
  }
}

at::Tensor make_input(const CollectiveCase& c) {
  const auto nan = c.carries_nan ? nan_source(c) : Source{.sender = -1};
  return filled(input_numel(c), c.dtype, [&](std::int64_t index) -> double {
    if (nan.sender == c.rank && nan.index == index) return NAN;
    const bool contributes = !reduces(c) || first_contributor(c, index) == c.rank ||
                             second_contributor(c, index) == c.rank;
    return contributes ? value_of(c, c.rank, index) : 0;
  });
}

at::Tensor make_expected(const CollectiveCase& c) {
  return filled(output_numel(c), c.dtype,
                [&](std::int64_t index) { return expected_value(c, index); });
}

at::Tensor make_output(const CollectiveCase& c, const at::Tensor& input) {
  const bool holds_input = c.collective == Collective::all_reduce ||
                           (c.collective == Collective::broadcast && c.rank == c.root);
  if (holds_input) return input.clone();
  return at::full({output_numel(c)}, kPoison, input.options());
}

Works launch(const CollectiveCase& c, c10d::ProcessGroup& group, at::Tensor& input,
             at::Tensor& output) {
  std::vector<at::Tensor> inputs{input};
  std::vector<at::Tensor> outputs{output};
  switch (c.collective) {
    case Collective::all_reduce:
      return {group.allreduce(outputs)};
    case Collective::reduce_scatter:
      return {reduce_scatter_single(group, output, input)};
    case Collective::all_gather:
      return {all_gather_single(group, output, input)};
    case Collective::broadcast: {
      c10d::BroadcastOptions options;
      options.rootRank = c.root;
      return {group.broadcast(outputs, options)};
    }
    case Collective::all_to_all:
      return {all_to_all_single(group, output, input)};
    case Collective::send_recv:
    case Collective::send_recv_reverse:
      break;
  }
  // NCCL runs a rank's send and receive concurrently only within one group call.
  const bool is_coalesced = !input.is_cpu();
  if (is_coalesced) group.startCoalescing(input.device().type());
  Works works{group.recv(outputs, previous(c), 0), group.send(inputs, next(c), 0)};
  if (is_coalesced) works = {group.endCoalescing(input.device().type())};
  return works;
}

void finish(const Works& works, at::Device device) {
  for (const auto& work : works) work->wait();
  if (device.is_cpu()) return;
  c10::impl::VirtualGuardImpl(device.type()).getStream(device).synchronize();
}

std::optional<WrongElement> find_wrong(const CollectiveCase& c, const at::Tensor& output,
                                       const at::Tensor& expected) {
  const auto found = output.cpu().to(at::kDouble);
  const auto wanted = expected.to(at::kDouble);
  const double* const is = found.const_data_ptr<double>();
  const double* const must_be = wanted.const_data_ptr<double>();
  std::optional<WrongElement> wrong;
  for (std::int64_t i = 0; i < found.numel(); ++i) {
    if (is[i] == must_be[i] || (std::isnan(is[i]) && std::isnan(must_be[i]))) continue;
    if (!wrong) wrong = {i, source_of(c, i).element, is[i], expected_element(c, i), 0};
    ++wrong->count;
  }
  return wrong;
}

}  // namespace nanlocator::netcheck
