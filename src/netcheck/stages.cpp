#include "netcheck/stages.hpp"
#include "nanlocator/error.hpp"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

#include "files/text.hpp"

namespace nanlocator::netcheck {
namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::ordered_json;

constexpr int kTimedExchanges = 8;
constexpr std::int64_t kSizeStep = 8;  // ratio of consecutive sizes
constexpr std::int64_t kSmallest = 8;  // bytes

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::string name_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return "fp32";
    case at::kBFloat16:
      return "bf16";
    case at::kHalf:
      return "fp16";
    default:
      return "int64";
  }
}

// Whether c10d's error says that a backend lacks an operation or a dtype.
bool is_unsupported_error(const std::string& error) {
  for (const char* words : {"does not support", "not supported", "unsupported", "Unsupported",
                            "not implemented", "Invalid scalar type", "No backend type"}) {
    if (error.find(words) != std::string::npos) return true;
  }
  return false;
}

// Elements of the whole message: at least one per rank, and a multiple of the ranks.
std::int64_t numel_for(std::int64_t bytes, at::ScalarType dtype, int size) {
  const auto numel = bytes / static_cast<std::int64_t>(c10::elementSize(dtype));
  return std::max<std::int64_t>(1, numel / size) * size;
}

std::vector<std::int64_t> sizes_up_to(std::int64_t max_bytes) {
  std::vector<std::int64_t> sizes;
  for (auto bytes = kSmallest; bytes < max_bytes; bytes *= kSizeStep) sizes.push_back(bytes);
  sizes.push_back(std::max(max_bytes, kSmallest));
  return sizes;
}

// The drill: changes one element.
void corrupt(at::Tensor& tensor, std::int64_t index) {
  auto element = tensor.flatten()[index % tensor.numel()];
  element.copy_(at::full({}, 123, tensor.options()) + element.nan_to_num());
}

std::string bytes_text(const CollectiveCase& c) {
  return size_text(static_cast<double>(c.numel) * static_cast<double>(c10::elementSize(c.dtype)));
}

// Adds a wrong element to the rank's result. `ranks`: the members of the case, global.
void report(RankCheck& check, const WrongElement& wrong, const std::string& step,
            const std::string& group, const std::vector<int>& ranks) {
  const auto global = [&](const std::set<int>& members) {
    std::set<int> numbers;
    for (const int member : members) numbers.insert(ranks.at(member));
    return numbers;
  };
  const auto senders = global(wrong.expected.senders);
  std::string from;
  for (const int sender : senders) from += (from.empty() ? "" : " and ") + std::to_string(sender);
  auto text = "got " + number_text(wrong.found, 6) + " instead of " +
              number_text(wrong.expected.value, 6) + " for element " + std::to_string(wrong.index) +
              " of " + step + " on group " + group + ", which rank " + from + " contributed";
  if (wrong.count > 1) text += " (" + std::to_string(wrong.count) + " wrong elements in all)";
  check.add("wrong", {{"sequence", check.sequence()},
                      {"element", wrong.element},
                      {"senders", senders},
                      {"receivers", global(wrong.expected.receivers)},
                      {"text", std::move(text)}});
}

class GroupCheck {
 public:
  GroupCheck(RankCheck& check, const CheckGroup& group, const CollectivePlan& plan,
             at::Device device)
      : check_(check), group_(group), plan_(plan), device_(device) {
    const auto self = std::ranges::find(group.ranks, check.options().rank);
    rank_ = static_cast<int>(self - group.ranks.begin());
  }

  void run() {
    for (const auto collective : kCollectives) {
      for (const auto dtype : plan_.dtypes) run(collective, dtype);
    }
  }

 private:
  void run(Collective collective, at::ScalarType dtype) {
    const auto sizes = sizes_up_to(plan_.max_bytes);
    const int size = static_cast<int>(group_.ranks.size());
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      // The roots of a broadcast take turns over the sizes; with the smallest size, all of them.
      const int roots = collective == Collective::broadcast && i == 0 ? size : 1;
      for (int root = 0; root < roots; ++root) {
        CollectiveCase c{.collective = collective, .dtype = dtype};
        c.numel = numel_for(sizes[i], dtype, size);
        c.root = roots > 1 ? root : static_cast<int>(i) % size;
        c.rank = rank_;
        c.size = size;
        c.seed = seed_++;
        run(c, i == 0 || i + 1 == sizes.size());
        if (i == 0 && root == 0 && dtype != at::kLong) {
          c.carries_nan = true;
          run(c, false);
        }
      }
    }
  }

  void run(const CollectiveCase& c, bool is_timed) {
    if (!group_.group) return check_.skip();
    auto name =
        std::string(netcheck::name_of(c.collective)) + " " + name_of(c.dtype) + " " + bytes_text(c);
    if (c.collective == Collective::broadcast) {
      name += " from rank " + std::to_string(group_.ranks[c.root]);
    }
    if (c.carries_nan) name += " with a NaN";
    check_.enter({"collectives", name, group_.name(), group_.ranks});
    try {
      const double seconds = exchange(c, name, is_timed ? 1 + plan_.repetitions : 1);
      if (is_timed) add_timing(c, seconds);
    } catch (const std::exception& error) {
      const auto text = first_line(error);
      if (!is_unsupported_error(text)) check_.end_by_error(text);
      check_.add("unsupported", std::string(netcheck::name_of(c.collective)) + " " +
                                    name_of(c.dtype) + " by " + check_.options().backend + " (" +
                                    text + ")");
    }
    check_.finished();
  }

  // The best time of the repetitions; each one is compared.
  double exchange(const CollectiveCase& c, const std::string& name, int repetitions) {
    auto input = make_input(c).to(device_);
    const auto expected = make_expected(c);
    const auto* corruption = check_.corruption();
    if (corruption != nullptr && corruption->in_contribution) corrupt(input, c.rank);
    double best = std::numeric_limits<double>::infinity();
    bool is_reported =
        false;  // a wrong element does not end the case: the other ranks need this one
    for (int repetition = 0; repetition < repetitions; ++repetition) {
      auto output = make_output(c, input);
      check_.before_launch();
      const auto start = Clock::now();
      const auto works = launch(c, *group_.group, input, output);
      check_.launched();
      finish(works, device_);
      if (repetition > 0) best = std::min(best, seconds_since(start));
      if (corruption != nullptr && !corruption->in_contribution) corrupt(output, c.seed);
      const auto wrong = find_wrong(c, output, expected);
      if (wrong && !std::exchange(is_reported, true)) {
        report(check_, *wrong, name, group_.name(), group_.ranks);
      }
    }
    return best;
  }

  void add_timing(const CollectiveCase& c, double seconds) {
    if (!std::isfinite(seconds)) return;
    const auto bytes = c.numel * static_cast<std::int64_t>(c10::elementSize(c.dtype));
    check_.add("timings", {{"collective", netcheck::name_of(c.collective)},
                           {"group_kind", group_.kind},
                           {"dtype", name_of(c.dtype)},
                           {"bytes", bytes},
                           {"seconds", seconds},
                           {"bus_factor", bus_factor(c)}});
  }

  RankCheck& check_;
  const CheckGroup& group_;
  const CollectivePlan& plan_;
  at::Device device_;
  int rank_ = 0;
  int seed_ = 0;
};

void barrier(const CheckGroup& world, at::Device device) {
  c10d::BarrierOptions options;
  if (!device.is_cpu()) options.device = device;
  finish({world.group->barrier(options)}, device);
}

// The time from the end of a barrier to the launch: the rank's own, without waiting for others.
double own_seconds(RankCheck& check, const CheckGroup& world, at::Device device) {
  CollectiveCase c{
      .numel = numel_for(std::int64_t{1} << 16, at::kFloat, static_cast<int>(world.ranks.size()))};
  c.rank = check.options().rank;
  c.size = static_cast<int>(world.ranks.size());
  double best = std::numeric_limits<double>::infinity();
  for (int repetition = 0; repetition < kTimedExchanges; ++repetition) {
    barrier(world, device);
    const auto start = Clock::now();
    auto input = make_input(c).to(device);
    auto output = make_output(c, input);
    check.before_launch();
    const auto works = launch(c, *world.group, input, output);
    best = std::min(best, seconds_since(start));
    finish(works, device);
  }
  return best;
}

// Two ranks send to each other while the others wait at the following barrier: there and back, as a
// send_recv in a group of two. The best time; every exchange is compared.
double exchange_seconds(RankCheck& check, const CheckGroup& world, const std::vector<int>& ends,
                        std::int64_t bytes, at::Device device) {
  CollectiveCase c{.collective = Collective::send_recv, .seed = check.sequence()};
  c.numel = numel_for(bytes, c.dtype, 1);
  c.rank = check.options().rank == ends[0] ? 0 : 1;
  c.size = 2;
  const int peer = ends[1 - c.rank];
  const auto expected = make_expected(c);
  const auto* corruption = check.corruption();
  std::vector<at::Tensor> sent{make_input(c).to(device)};
  if (corruption != nullptr && corruption->in_contribution) corrupt(sent[0], c.rank);
  double best = std::numeric_limits<double>::infinity();
  bool is_reported = false;
  for (int repetition = 0; repetition <= kTimedExchanges; ++repetition) {
    std::vector<at::Tensor> received{make_output(c, sent[0])};
    const auto start = Clock::now();
    check.before_launch();
    if (c.rank == 0) {
      finish({world.group->send(sent, peer, 0)}, device);
      finish({world.group->recv(received, peer, 0)}, device);
    } else {
      finish({world.group->recv(received, peer, 0)}, device);
      finish({world.group->send(sent, peer, 0)}, device);
    }
    if (repetition > 0) best = std::min(best, seconds_since(start));
    if (corruption != nullptr && !corruption->in_contribution) corrupt(received[0], c.seed);
    const auto wrong = find_wrong(c, received[0], expected);
    if (wrong && !std::exchange(is_reported, true)) {
      report(check, *wrong, "exchange fp32 " + bytes_text(c), "WORLD", ends);
    }
  }
  return best;
}

std::vector<std::pair<int, int>> edges_of(Neighbours neighbours, int size) {
  std::vector<std::pair<int, int>> edges;
  for (int from = 0; from < size; ++from) {
    if (neighbours == Neighbours::every_pair) {
      for (int to = from + 1; to < size; ++to) edges.emplace_back(from, to);
    } else if (size > 2 || from == 0) {
      edges.emplace_back(from, (from + 1) % size);
    }
  }
  return edges;
}

// A step whose error ends the check.
template <typename Work>
void run_step(RankCheck& check, const Step& step, const Work& work) {
  check.enter(step);
  try {
    check.launched();
    work();
  } catch (const std::exception& error) {
    check.end_by_error(first_line(error));
  }
  check.finished();
}

}  // namespace

std::string CheckGroup::name() const {
  if (kind == "WORLD") return kind;
  std::string text = kind + "[";
  for (std::size_t i = 0; i < ranks.size(); ++i)
    text += (i > 0 ? "," : "") + std::to_string(ranks[i]);
  return text + "]";
}

void run_barrier(RankCheck& check, const CheckGroup& world, at::Device device) {
  run_step(check, {"barrier", "barrier", world.name(), world.ranks},
           [&] { barrier(world, device); });
}

void run_collectives(RankCheck& check, const CheckGroup& group, const CollectivePlan& plan,
                     at::Device device) {
  GroupCheck(check, group, plan, device).run();
}

void run_timing(RankCheck& check, const CheckGroup& world, Neighbours neighbours,
                std::int64_t bytes, at::Device device) {
  run_step(check, {"timing", "launch times", world.name(), world.ranks},
           [&] { check.set("own_seconds", own_seconds(check, world, device)); });
  const int rank = check.options().rank;
  for (const auto& [from, to] : edges_of(neighbours, static_cast<int>(world.ranks.size()))) {
    if (rank == from || rank == to) {
      const auto name = "exchange of ranks " + std::to_string(from) + " and " + std::to_string(to);
      run_step(check, {"timing", name, "WORLD", {from, to}}, [&] {
        const double best = exchange_seconds(check, world, {from, to}, bytes, device);
        if (rank == from) check.add("edges", {{"from", from}, {"to", to}, {"seconds", best}});
      });
    } else {
      check.skip();
    }
    run_step(check, {"timing", "barrier", world.name(), world.ranks},
             [&] { barrier(world, device); });
  }
}

}  // namespace nanlocator::netcheck
