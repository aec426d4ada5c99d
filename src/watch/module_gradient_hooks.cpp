#include "watch/module_gradient_hooks.hpp"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <limits>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "watch/torch_versions.hpp"

namespace nanlocator::module_watch {
namespace {

namespace autograd = torch::autograd;

/// The gradients at a node that its hook scans for one call.
class NodeScan {
 public:
  struct Part {
    std::uint32_t number;  // the gradient's index
    TensorPlace place;
    std::string role;
    const c10::TensorImpl* parameter;  // weight_gradient
  };

  NodeScan(std::shared_ptr<State> state, ModuleCallId call, std::string node,
           std::vector<Part> parts = {})
      : state_(std::move(state)),
        step_(state_->step),
        call_(call),
        node_(std::move(node)),
        parts_(std::move(parts)) {}

  void add(Part part) { parts_.push_back(std::move(part)); }

  void see(const autograd::variable_list& gradients) const {
    const std::lock_guard lock(state_->mutex);
    if (!state_->is_alive || state_->step != step_) return;
    for (const auto& part : parts_) {
      if (part.number >= gradients.size()) continue;
      state_->see(call_, part.place, gradients[part.number], part.role, node_, part.parameter);
    }
  }

 private:
  std::shared_ptr<State> state_;
  std::uint64_t step_;
  ModuleCallId call_;
  std::string node_;
  std::vector<Part> parts_;
};

/// On a node that made outputs of a call: scans the gradients of these outputs.
class GradOutputHook : public LeftOutOfCompiledAutograd<autograd::FunctionPreHook> {
 public:
  explicit GradOutputHook(NodeScan scan) : scan_(std::move(scan)) {}

  autograd::variable_list operator()(const autograd::variable_list& gradients) override {
    scan_.see(gradients);
    return gradients;
  }

 private:
  NodeScan scan_;
};

/// On a node at a call's boundary: scans the gradients that it passes to the call's inputs and to
/// parameters.
class ContributionHook : public LeftOutOfCompiledAutograd<autograd::FunctionPostHook> {
 public:
  explicit ContributionHook(NodeScan scan) : scan_(std::move(scan)) {}

  autograd::variable_list operator()(const autograd::variable_list& outputs,
                                     const autograd::variable_list& /*inputs*/) override {
    scan_.see(outputs);
    return outputs;
  }

 private:
  NodeScan scan_;
};

bool was_made_during(const Call& call, const autograd::Node& node) {
  // AccumulateGrad has the largest possible number.
  return node.sequence_nr() >= call.first_sequence_number &&
         node.sequence_nr() != std::numeric_limits<std::uint64_t>::max();
}

const autograd::AccumulateGrad* accumulator_of(const autograd::Edge& edge) {
  return edge.function->sequence_nr() == std::numeric_limits<std::uint64_t>::max()
             ? dynamic_cast<const autograd::AccumulateGrad*>(edge.function.get())
             : nullptr;
}

const Call::InputEdge* input_at(const Call& call, const autograd::Edge& edge) {
  for (const auto& input : call.inputs) {
    if (input.edge.is_valid() && input.edge == edge) return &input;
  }
  return nullptr;
}

}  // namespace

autograd::Edge edge_of(const at::Tensor& tensor) {
  try {
    return autograd::impl::gradient_edge(tensor);
  } catch (const c10::Error&) {
    return {};
  }
}

void hook_gradients(const std::shared_ptr<State>& state, ModuleCallId id,
                    std::span<const NamedTensor> outputs) {
  Call& call = state->calls[id];
  for (auto& input : call.inputs) {
    if (!input.leaf.defined()) continue;
    if (auto accumulator = autograd::impl::try_get_grad_accumulator(input.leaf)) {
      input.edge = {std::move(accumulator), 0};
    }
  }
  std::vector<autograd::Node*> to_visit;
  std::vector<std::pair<autograd::Node*, NodeScan>> of_outputs;
  for (const auto& [role, tensor] : outputs) {
    if (!DeferredScans::can_scan(tensor) || !tensor.requires_grad() || tensor.is_leaf()) continue;
    const autograd::Edge edge = edge_of(tensor);
    // The call did not compute this output: it is an input passed through, or a cached value.
    if (!edge.is_valid() || !was_made_during(call, *edge.function) || input_at(call, edge)) {
      continue;
    }
    auto* const node = edge.function.get();
    auto found = std::ranges::find(of_outputs, node, [](const auto& n) { return n.first; });
    if (found == of_outputs.end()) {
      of_outputs.emplace_back(node, NodeScan(state, id, node->name()));
      found = of_outputs.end() - 1;
      to_visit.push_back(node);
    }
    found->second.add({edge.input_nr, TensorPlace::grad_output, role, nullptr});
  }
  for (auto& [node, scan] : of_outputs) {
    node->add_pre_hook(std::make_unique<GradOutputHook>(std::move(scan)));
  }

  std::unordered_set<autograd::Node*> visited(to_visit.begin(), to_visit.end());
  std::vector<NodeScan::Part> contributions;
  while (!to_visit.empty()) {
    autograd::Node* const node = to_visit.back();
    to_visit.pop_back();
    contributions.clear();
    const auto& edges = node->next_edges();
    for (std::uint32_t i = 0; i < edges.size(); ++i) {
      const autograd::Edge& edge = edges[i];
      if (!edge.is_valid()) continue;
      if (const auto* input = input_at(call, edge)) {
        contributions.push_back({i, TensorPlace::grad_input, input->role, nullptr});
      } else if (const auto* accumulator = accumulator_of(edge)) {
        const auto* parameter = accumulator->variable.unsafeGetTensorImpl();
        contributions.push_back({i, TensorPlace::weight_gradient, "", parameter});
        call.parameters.push_back(parameter);
      } else if (was_made_during(call, *edge.function) &&
                 visited.insert(edge.function.get()).second) {
        to_visit.push_back(edge.function.get());
      }
    }
    if (!contributions.empty()) {
      node->add_post_hook(
          std::make_unique<ContributionHook>(NodeScan(state, id, node->name(), contributions)));
    }
  }
}

}  // namespace nanlocator::module_watch
