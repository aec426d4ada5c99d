// The boundary watch: a rank's collectives, sends and receives.
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "nanlocator/watch/boundary_watch.hpp"
#include "nanlocator/watch/position.hpp"

namespace py = pybind11;
using py::literals::operator""_a;

namespace nanlocator {
namespace {

using Tensors = std::vector<at::Tensor>;
using ReleaseGil = py::call_guard<py::gil_scoped_release>;

/// The tensors in `object`: one, or lists and tuples of them as torch.distributed nests them.
void add_tensors(PyObject* object, Tensors& tensors) {
  if (THPVariable_Check(object)) {
    tensors.push_back(THPVariable_Unpack(object));
  } else if (PyList_Check(object) || PyTuple_Check(object)) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); ++i) {
      add_tensors(PySequence_Fast_GET_ITEM(object, i), tensors);
    }
  }
}

Tensors tensors_in(const py::object& object) {
  Tensors tensors;
  add_tensors(object.ptr(), tensors);
  return tensors;
}

MicrobatchPlace place_of(std::optional<int> microbatch, std::optional<int> chunk) {
  return {microbatch, chunk};
}

using ScheduleStep = void (BoundaryWatch::*)(MicrobatchPlace, std::span<const at::Tensor>);

template <ScheduleStep step>
void schedule_step(BoundaryWatch& watch, std::optional<int> microbatch, std::optional<int> chunk,
                   const py::object& tensors) {
  const auto all = tensors_in(tensors);
  const py::gil_scoped_release release;
  (watch.*step)(place_of(microbatch, chunk), all);
}

void bind_crossings(py::class_<BoundaryWatch, std::shared_ptr<BoundaryWatch>>& watch) {
  watch
      .def("add_group", &BoundaryWatch::add_group, "name"_a, "members"_a, ReleaseGil(),
           "`members`: global ranks. Returns the number by which the group is named below.")
      .def("has_unwatched", &BoundaryWatch::has_unwatched, "group"_a, ReleaseGil())
      .def(
          "begin_collective",
          [](BoundaryWatch& w, CrossingGroup group, const std::string& op, const py::object& sent) {
            const auto tensors = tensors_in(sent);
            const py::gil_scoped_release release;
            return w.begin_collective(group, op, tensors);
          },
          "group"_a, "op"_a, "sent"_a)
      .def(
          "begin_send",
          [](BoundaryWatch& w, CrossingGroup group, int peer, const py::object& sent) {
            const auto tensors = tensors_in(sent);
            const py::gil_scoped_release release;
            return w.begin_send(group, peer, tensors);
          },
          "group"_a, "peer"_a, "sent"_a)
      .def("was_issued", &BoundaryWatch::was_issued, "crossing"_a, ReleaseGil())
      .def("skip_collective", &BoundaryWatch::skip_collective, "group"_a, ReleaseGil())
      .def("skip_message", &BoundaryWatch::skip_message, "group"_a, "peer"_a, "is_received"_a,
           ReleaseGil())
      .def("begin_receive", &BoundaryWatch::begin_receive, "group"_a, "peer"_a, ReleaseGil())
      .def(
          "finish",
          [](BoundaryWatch& w, CrossingId crossing, const py::object& received) {
            const auto tensors = tensors_in(received);
            const py::gil_scoped_release release;
            w.finish(crossing, tensors);
          },
          "crossing"_a, "received"_a);
}

void bind_places(py::class_<BoundaryWatch, std::shared_ptr<BoundaryWatch>>& watch) {
  using Call =
      std::pair<std::size_t, std::size_t>;  // previous depth of the module stack, and of the watch
  watch
      .def(
          "enter",
          [](BoundaryWatch& w, const PathHandle& handle) {
            const auto depth = enter_module(handle.path);
            return Call(depth, w.enter(handle.path));
          },
          "path"_a)
      .def(
          "leave",
          [](BoundaryWatch& w, const Call& call) {
            leave_modules(call.first);
            w.leave(call.second);
          },
          "call"_a)
      .def(
          "enter_transfer",
          [](BoundaryWatch& w, const PathHandle& owner, bool reduces_gradients) {
            w.enter_transfer(owner.path, reduces_gradients);
          },
          "owner"_a, "reduces_gradients"_a)
      .def("leave_transfer", &BoundaryWatch::leave_transfer)
      .def("begin_forward", &schedule_step<&BoundaryWatch::begin_forward>, "microbatch"_a,
           "chunk"_a, "inputs"_a)
      .def("end_forward", &schedule_step<&BoundaryWatch::end_forward>, "microbatch"_a, "chunk"_a,
           "outputs"_a)
      .def("begin_backward", &schedule_step<&BoundaryWatch::begin_backward>, "microbatch"_a,
           "chunk"_a, "output_grads"_a)
      .def("end_backward", &schedule_step<&BoundaryWatch::end_backward>, "microbatch"_a, "chunk"_a,
           "input_grads"_a);
}

void bind_coverage(py::module_& m) {
  py::class_<CrossingCoverage>(m, "CrossingCoverage")
      .def_readonly("group", &CrossingCoverage::group)
      .def_property_readonly("members",
                             [](const CrossingCoverage& self) { return self.members.ranks(); })
      .def_readonly("peer", &CrossingCoverage::peer)
      .def_property_readonly("role", [](const CrossingCoverage& c) { return c.role.text(); })
      .def_readonly("count", &CrossingCoverage::count);
  py::class_<Crossing>(m, "Crossing")
      .def_readonly("group", &Crossing::group)
      .def_property_readonly("members", [](const Crossing& self) { return self.members.ranks(); })
      .def_readonly("peer", &Crossing::peer)
      .def_readonly("sequence", &Crossing::sequence);
  m.def(
      "crossing_of", [](const Sighting& sighting) { return sighting.crossing; }, "sighting"_a,
      "How the sighted tensor went from rank to rank; None where it did not.");
  m.def("current_position", &current_position,
        "The number of crossings that this rank has issued in the pass; None if unknown.");
}

}  // namespace

void bind_boundary(py::module_& m) {
  bind_coverage(m);
  py::class_<BoundaryWatch, std::shared_ptr<BoundaryWatch>> watch(m, "BoundaryWatch");
  watch.def(py::init<int>(), "threads"_a = 1)
      .def("begin_step", &BoundaryWatch::begin_step, ReleaseGil());
  bind_crossings(watch);
  bind_places(watch);
  watch.def(
      "collect",
      [](BoundaryWatch& w, std::int64_t iteration) {
        BoundaryWatch::Collected collected;
        {
          const py::gil_scoped_release release;
          collected = w.collect(iteration);
        }
        return std::pair{std::move(collected.sightings), std::move(collected.coverage)};
      },
      "iteration"_a, "(sightings, coverage)");
}

}  // namespace nanlocator
