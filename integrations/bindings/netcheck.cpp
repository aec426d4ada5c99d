// The network check. Its stages run in C++ without the GIL; Python passes in options and groups.
#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bindings.hpp"
#include "nanlocator/error.hpp"
#include "netcheck/rank_check.hpp"
#include "netcheck/stages.hpp"

namespace py = pybind11;
using py::literals::operator""_a;

namespace nanlocator {
namespace {

using netcheck::CheckGroup;
using netcheck::CollectivePlan;
using netcheck::Injection;
using netcheck::Neighbours;
using netcheck::RankCheck;
using netcheck::RankCheckOptions;
using ReleaseGil = py::call_guard<py::gil_scoped_release>;

Injection::Kind kind_of(const std::string& name) {
  if (name == "corrupt") return Injection::Kind::corrupt;
  if (name == "slow") return Injection::Kind::slow;
  if (name == "hang") return Injection::Kind::hang;
  if (name == "stop") return Injection::Kind::stop;
  if (name == "die") return Injection::Kind::die;
  return Injection::Kind::none;  // Python's facts include "skew"
}

Injection::Moment moment_of(const std::string& name) {
  if (name == "inside") return Injection::Moment::inside;
  return name == "after" ? Injection::Moment::after : Injection::Moment::before;
}

at::ScalarType dtype_of(const std::string& name) {
  if (name == "fp32") return at::kFloat;
  if (name == "bf16") return at::kBFloat16;
  if (name == "fp16") return at::kHalf;
  if (name == "int64") return at::kLong;
  throw UsageError("--dtypes: '" + name + "' is not one of fp32, bf16, fp16, int64");
}

CollectivePlan plan_of(const std::vector<std::string>& dtypes, std::int64_t max_bytes,
                       int repetitions) {
  CollectivePlan plan{.max_bytes = max_bytes, .repetitions = repetitions};
  for (const auto& name : dtypes) plan.dtypes.push_back(dtype_of(name));
  return plan;
}

nlohmann::ordered_json json_of(const std::string& text) {
  return nlohmann::ordered_json::parse(text);
}

}  // namespace

void bind_netcheck(py::module_& m) {
  py::class_<CheckGroup>(m, "CheckGroup")
      .def(py::init([](std::string kind, std::vector<int> ranks,
                       std::optional<c10::intrusive_ptr<c10d::ProcessGroup>> group) {
             return CheckGroup{std::move(kind), std::move(ranks),
                               group.value_or(c10::intrusive_ptr<c10d::ProcessGroup>())};
           }),
           "kind"_a, "ranks"_a, "group"_a = std::nullopt);
  py::class_<RankCheck, std::shared_ptr<RankCheck>>(m, "RankCheck")
      .def(py::init([](c10::intrusive_ptr<c10d::Store> store, int rank, int world_size,
                       int local_rank, std::string host, std::string backend,
                       std::chrono::milliseconds deadline, bool as_json, bool colour,
                       std::string output, int terminal, const std::string& inject, std::string at,
                       const std::string& moment, bool in_contribution) {
             return std::make_shared<RankCheck>(
                 std::move(store),
                 RankCheckOptions{rank, world_size, local_rank, std::move(host), std::move(backend),
                                  deadline, as_json, colour, std::move(output), terminal},
                 Injection{.kind = kind_of(inject),
                           .moment = moment_of(moment),
                           .at = std::move(at),
                           .in_contribution = in_contribution});
           }),
           py::kw_only(), "store"_a, "rank"_a, "world_size"_a, "local_rank"_a, "host"_a,
           "backend"_a, "deadline"_a, "as_json"_a, "colour"_a, "output"_a, "terminal"_a,
           "inject"_a = "", "at"_a = "", "moment"_a = "before", "in_contribution"_a = false,
           ReleaseGil())
      .def(
          "enter",
          [](RankCheck& check, const std::string& stage, const std::string& name,
             const std::vector<int>& ranks, std::chrono::milliseconds extra) {
            check.enter({stage, name, ranks.empty() ? "" : "WORLD", ranks, extra});
            if (!ranks.empty()) check.launched();
          },
          "stage"_a, "name"_a, "ranks"_a = std::vector<int>(),
          "extra"_a = std::chrono::milliseconds(0), ReleaseGil(),
          "The next step; with `ranks`, one that they make together.")
      .def("finished", &RankCheck::finished, ReleaseGil())
      .def(
          "add",
          [](RankCheck& c, const std::string& key, const std::string& json) {
            c.add(key, json_of(json));
          },
          "key"_a, "json"_a)
      .def(
          "set",
          [](RankCheck& c, const std::string& key, const std::string& json) {
            c.set(key, json_of(json));
          },
          "key"_a, "json"_a)
      .def("publish", &RankCheck::publish, "key"_a, "text"_a, ReleaseGil())
      .def("collect", &RankCheck::collect, "key"_a, ReleaseGil())
      .def("meet", &RankCheck::meet, ReleaseGil())
      .def("finish", &RankCheck::finish, ReleaseGil())
      .def("end_by_error", &RankCheck::end_by_error, "error"_a, ReleaseGil())
      .def("end_by_failure", &RankCheck::end_by_failure, "error"_a, ReleaseGil());
  m.def(
      "check_barrier",
      [](RankCheck& check, const CheckGroup& world, const std::string& device) {
        netcheck::run_barrier(check, world, at::Device(device));
      },
      "check"_a, "world"_a, "device"_a, ReleaseGil());
  m.def(
      "check_collectives",
      [](RankCheck& check, const CheckGroup& group, const std::vector<std::string>& dtypes,
         std::int64_t max_bytes, int repetitions, const std::string& device) {
        netcheck::run_collectives(check, group, plan_of(dtypes, max_bytes, repetitions),
                                  at::Device(device));
      },
      "check"_a, "group"_a, "dtypes"_a, "max_bytes"_a, "repetitions"_a, "device"_a, ReleaseGil());
  m.def(
      "check_timing",
      [](RankCheck& check, const CheckGroup& world, bool every_pair, std::int64_t bytes,
         const std::string& device) {
        netcheck::run_timing(check, world, every_pair ? Neighbours::every_pair : Neighbours::ring,
                             bytes, at::Device(device));
      },
      "check"_a, "world"_a, "every_pair"_a, "bytes"_a, "device"_a, ReleaseGil());
}

}  // namespace nanlocator
