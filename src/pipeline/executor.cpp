#include "pipeline/executor.h"

#include "ops/embedding.h"
#include "ops/linear_cross_entropy.h"

namespace marrow {
namespace {

// Runs one layer's work; an error from it says which layer.
template <typename Work>
void in_layer(int64_t layer, const char* direction, const Work& work) {
  try {
    work();
  } catch (Error& error) {
    error.add_who(fmt::format("layer {} {}", layer, direction));
    throw;
  }
}

}  // namespace

Executor::Executor(const MoeModel& model, const ModelParts& parts, ParameterStore& store, BalanceTracker* tracker,
                   const Options& options)
    : model_(&model), parts_(parts), store_(&store), options_(options), device_(store.options().device) {
  rope_ = model.rope_table(device_);
  layer_options_ = {parts.experts, tracker, options.recompute_layers, options.recompute_cheap, options.overlap};
  for (int64_t slot = 0; slot < parts.pipeline.slots(); ++slot) {
    const auto [first, last] = parts.layers(slot, model.shape());
    for (int64_t layer = first; layer < last; ++layer) {
      Layer& own = layers_[layer];
      own.layer = model.make_layer(layer, store.table());
      own.groups = store.groups_of(fmt::format("layers.{}", layer));
    }
  }
  embedding_ = store.groups_of("embedding");
  head_ = store.groups_of("head");
  if (model.shape().tied_embeddings) tied_ = embedding_;
}

const Parameter& Executor::head() const {
  return store_->table().at(model_->shape().tied_embeddings ? "embedding" : "head");
}

void Executor::train(int64_t count, const MicroBatchSource& source, double gradient_scale, const at::Tensor& loss_sum,
                     ActionTimer* timer) {
  gradient_scale_ = gradient_scale;
  loss_sum_ = loss_sum;
  timer_ = timer;
  begin_step(count, source, /*backward=*/true);
  // One rank with all experts has nothing to hide: a pair would only keep two micro-batches alive.
  if (parts_.pipeline.pp == 1 && parts_.experts == nullptr) {
    for (int64_t i = 0; i < count; ++i) {
      run({ActionKind::kForward, {0, i}, {}});
      run({ActionKind::kBackward, {}, {0, i}});
    }
  } else {
    for (const PipelineAction& action : pipeline_actions(parts_.pipeline, parts_.pipeline_rank, count)) run(action);
  }
  timer_ = nullptr;
  end_step();
}

at::Tensor Executor::evaluate(int64_t count, const MicroBatchSource& source) {
  const at::NoGradGuard no_grad;
  loss_sum_ = at::zeros({1}, at::TensorOptions().device(device_).dtype(at::kDouble));
  begin_step(count, source, /*backward=*/false);
  const bool two = parts_.pipeline.slots() == 2;
  // Micro-batches come back up the V after they went down through the ranks below.
  const int64_t delay = two ? parts_.pipeline.pp - 1 - parts_.pipeline_rank : 0;
  for (int64_t i = 0; i < count + delay; ++i) {
    if (i < count) run_passes({0, i}, {}, false);
    if (two && i >= delay) run_passes({1, i - delay}, {}, false);
  }
  end_step();
  return std::exchange(loss_sum_, {});
}

void Executor::run(const PipelineAction& action) {
  if (timer_ != nullptr) timer_->begin(action);
  if (action.kind == ActionKind::kWeightGrad) return run_weight_grads(action.backward);
  run_passes(action.forward, action.backward, action.kind != ActionKind::kBackwardInput);
}

void Executor::run_passes(const PipelinePass& forward, const PipelinePass& backward, bool weight_grads) {
  Flight* down = forward ? &start_forward(forward) : nullptr;
  Flight* up = backward ? &flights_.at({backward.slot, backward.micro_batch}) : nullptr;
  if (up != nullptr && !parts_.has_head(backward.slot)) up->values = take(false, backward);
  run_layers(forward, down, backward, up, weight_grads);
  if (down != nullptr) finish_forward(forward, *down);
  if (up != nullptr) finish_backward(backward, *up, weight_grads);
}

// Layer by layer, each direction's steps between the other's, if there are both: its products hide what those send.
void Executor::run_layers(const PipelinePass& forward, Flight* down, const PipelinePass& backward, Flight* up,
                          bool weight_grads) {
  const auto range = [&](const PipelinePass& pass) {
    return pass ? parts_.layers(pass.slot, model_->shape()) : LayerRange{};
  };
  auto [layer, end] = range(forward);
  auto [first_up, layer_up] = range(backward);
  while (layer < end || layer_up > first_up) {
    const auto on_way_down = [&](const auto& work) {
      if (layer < end) in_layer(layer, "forward", work);
    };
    const auto on_way_up = [&](const auto& work) {
      if (layer_up > first_up) in_layer(layer_up - 1, "backward", work);
    };
    on_way_up([&] { start_layer_backward(*up, layer_up - 1); });
    on_way_down([&] { start_layer(*down, layer); });
    on_way_up([&] { up->layers.back().run_experts_backward(); });
    on_way_down([&] { rows_sent_ += down->layers.back().start_dispatch(); });  // waits for sizes behind queued work
    if (weight_grads) on_way_up([&] { up->weight_grads.run_all(); });
    on_way_down([&] { down->layers.back().run_experts(); });
    on_way_up([&] { finish_layer_backward(backward, *up, layer_up - 1, weight_grads); });
    on_way_down([&] { finish_layer(*down, layer); });
    ++layer;
    --layer_up;
  }
}

Executor::Flight& Executor::start_forward(const PipelinePass& pass) {
  Flight& flight = flights_[{pass.slot, pass.micro_batch}];
  flight.batch = made_batch(pass.micro_batch);
  if (pass.slot == parts_.pipeline.slots() - 1) batches_.erase(pass.micro_batch);  // the last chunk to read it
  LayerContext& context = flight.batch.context;
  context.rope = rope_;
  context.weight_grads = &flight.weight_grads;
  context.forced_routing = options_.forced_routing;
  context.deterministic = options_.deterministic;
  context.context_ring = parts_.context;
  if (parts_.embeds(pass.slot)) {
    acquire(embedding_);
    flight.values = embedding_forward(flight.batch.tokens, store_->table().at("embedding"));
    release(embedding_);
  } else {
    flight.values = take(true, pass);
  }
  return flight;
}

void Executor::start_layer(Flight& flight, int64_t layer) {
  const Layer& own = layers_.at(layer);
  acquire(own.groups);
  flight.layers.emplace_back(*own.layer, layer - model_->shape().dense_layers, layer_options_);
  flight.layers.back().start_forward(flight.values, flight.batch.context);
}

void Executor::finish_layer(Flight& flight, int64_t layer) {
  flight.values = flight.layers.back().finish_forward();
  release(layers_.at(layer).groups);
  if (!at::GradMode::is_enabled()) flight.layers.pop_back();
}

void Executor::finish_forward(const PipelinePass& pass, Flight& flight) {
  const bool has_head = parts_.has_head(pass.slot);
  if (has_head) run_head(pass, flight);
  if (timer_ != nullptr) timer_->output_ready();
  if (!has_head) hand_on(true, pass, std::exchange(flight.values, {}));
  if (!at::GradMode::is_enabled()) flights_.erase({pass.slot, pass.micro_batch});
}

// Leaves the gradient of the last layer's output in flight.values.
void Executor::run_head(const PipelinePass& pass, Flight& flight) {
  const bool training = at::GradMode::is_enabled();
  for (const Groups groups : {head_, tied_}) {
    acquire(groups);
    if (training) open_gradients(groups);
  }
  StageGraph norm;
  const at::Tensor normed = norm.forward({std::exchange(flight.values, {})}, [&](const auto& in) {
    return std::vector<at::Tensor>{model_->final_norm(in[0], store_->table())};
  })[0];
  LinearCrossEntropy loss = linear_cross_entropy(normed, head(), flight.batch.targets, gradient_scale_, training);
  loss_sum_.add_(loss.loss_sum);
  if (training) {
    flight.values = norm.backward({std::move(loss.d_x)})[0];
    start_reduce(head_, pass.micro_batch);  // tied weights have more to come, from the embedding
  }
  release(head_);
  release(tied_);
}

void Executor::start_layer_backward(Flight& flight, int64_t layer) {
  const Groups groups = layers_.at(layer).groups;
  acquire(groups);
  open_gradients(groups);
  flight.layers.back().start_backward(flight.values);
}

void Executor::finish_layer_backward(const PipelinePass& pass, Flight& flight, int64_t layer, bool weight_grads) {
  flight.values = flight.layers.back().finish_backward();
  flight.layers.pop_back();
  const Groups groups = layers_.at(layer).groups;
  release(groups);
  if (!weight_grads) return;
  flight.weight_grads.run_all();
  start_reduce(groups, pass.micro_batch);
}

void Executor::finish_backward(const PipelinePass& pass, Flight& flight, bool weight_grads) {
  const at::Tensor gradient = std::exchange(flight.values, {});
  if (parts_.embeds(pass.slot)) {
    open_gradients(embedding_);
    embedding_backward(flight.batch.tokens, gradient, store_->table().at("embedding"), options_.deterministic);
    start_reduce(embedding_, pass.micro_batch);
  }
  if (timer_ != nullptr) timer_->output_ready();
  if (!parts_.embeds(pass.slot)) hand_on(false, pass, gradient);
  if (weight_grads) flights_.erase({pass.slot, pass.micro_batch});
}

void Executor::run_weight_grads(const PipelinePass& pass) {
  const auto [first, last] = parts_.layers(pass.slot, model_->shape());
  for (int64_t layer = first; layer < last; ++layer) open_gradients(layers_.at(layer).groups);
  flights_.at({pass.slot, pass.micro_batch}).weight_grads.run_all();
  flights_.erase({pass.slot, pass.micro_batch});
  for (int64_t layer = last - 1; layer >= first; --layer) start_reduce(layers_.at(layer).groups, pass.micro_batch);
  if (timer_ != nullptr) timer_->output_ready();
}

// Every chunk of a rank reads the same micro-batch: it is made once.
MicroBatch& Executor::made_batch(int64_t index) {
  const auto found = batches_.find(index);
  if (found != batches_.end()) return found->second;
  return batches_.emplace(index, (*source_)(index)).first->second;
}

// ---- parameters of a group: there from acquire to release, gradients from open_gradients to start_reduce

void Executor::acquire(Groups groups) {
  for (FlatGroup& group : groups) {
    if (store_->options().by_layer) store_->start_gather(group);
    store_->finish_gather(group);
  }
}

void Executor::release(Groups groups) {
  for (FlatGroup& group : groups) store_->release(group);
}

void Executor::open_gradients(Groups groups) {
  for (FlatGroup& group : groups) store_->open_grad(group);
}

// Weight gradients of a chunk come in the order of its micro-batches.
void Executor::start_reduce(Groups groups, int64_t micro_batch) {
  if (micro_batch != count_ - 1 && !store_->options().by_layer) return;
  for (FlatGroup& group : groups) store_->start_reduce(group);
  if (!store_->options().by_layer) return;
  for (FlatGroup& group : std::exchange(reducing_, groups)) store_->finish_reduce(group);
}

// ---- what comes from and goes to the neighbours

void Executor::begin_step(int64_t count, const MicroBatchSource& source, bool backward) {
  count_ = count;
  source_ = &source;
  const PipelineShape& shape = parts_.pipeline;
  const auto open = [&](Link& link, Communicator* channel, int64_t from) {
    link = {};
    link.channel = channel;
    if (channel == nullptr) return;
    if (backward) {
      link.messages = link_messages(shape, count, from, parts_.pipeline_rank);
    } else {
      const int64_t slot = from < parts_.pipeline_rank ? 0 : 1;
      for (int64_t i = 0; i < count; ++i) {
        if (slot < shape.slots()) link.messages.push_back({true, {slot, i}});
      }
    }
    message_shape_ = {made_batch(0).tokens.size(0), model_->shape().hidden};
  };
  open(from_previous_, parts_.from_previous, parts_.pipeline_rank - 1);
  open(from_next_, parts_.from_next, parts_.pipeline_rank + 1);
}

void Executor::end_step() {
  while (!sends_.empty()) wait_for_oldest_send();
  MARROW_CHECK(flights_.empty() && mail_.empty(), ExitCode::kDeviceFault, Fix("report this: the schedule is wrong"),
               "{} passes and {} messages are left at the end of a step", flights_.size(), mail_.size());
  source_ = nullptr;
}

// Received where it is needed, not ahead: a GPU's receive keeps processors busy until its message comes, and stretched
// the work beside it by a third; and in the first step it waits for kernels that cannot be loaded meanwhile.
at::Tensor Executor::take(bool forward, const PipelinePass& pass) {
  const int64_t from = source_rank(parts_.pipeline, parts_.pipeline_rank, forward, pass.slot);
  const bool previous = from < parts_.pipeline_rank;
  Link& link = previous ? from_previous_ : from_next_;
  const std::tuple wanted(forward, pass.slot, pass.micro_batch);
  while (!mail_.contains(wanted)) {
    const PipelineMessage& message = link.messages.at(link.received++);
    const auto options = at::TensorOptions(device_).dtype(store_->options().working_dtype);
    const at::Tensor values = at::empty(message_shape_, options);
    link.channel->receive(values, previous ? 0 : 1).wait();
    mail_.emplace(std::tuple(message.forward, message.pass.slot, message.pass.micro_batch), values);
    if (timer_ != nullptr) timer_->input_arrived();
  }
  return std::move(mail_.extract(wanted).mapped());
}

void Executor::hand_on(bool forward, const PipelinePass& pass, at::Tensor values) {
  const int64_t to = target_rank(parts_.pipeline, parts_.pipeline_rank, forward, pass.slot);
  if (to == parts_.pipeline_rank) {
    mail_.emplace(std::tuple(forward, 1 - pass.slot, pass.micro_batch), std::move(values));
    return;
  }
  const bool next = to > parts_.pipeline_rank;
  sends_.push_back((next ? parts_.to_next : parts_.to_previous)->send(values.contiguous(), next ? 1 : 0));
  // Two neighbours that wait for each other's receive would wait for ever; as many messages as a rank has
  // passes alive are never on their way in both directions at once.
  if (std::cmp_greater(sends_.size(), 2 * parts_.pipeline.pp + 1)) wait_for_oldest_send();
}

void Executor::wait_for_oldest_send() {
  sends_.front().wait();
  sends_.pop_front();
}

// ---- one rank alone

at::Tensor Executor::hidden_states(MicroBatch batch) {
  const at::NoGradGuard no_grad;
  const MicroBatchSource source = [&](int64_t) { return batch; };
  begin_step(1, source, false);
  Flight& flight = start_forward({0, 0});
  run_layers({0, 0}, &flight, {}, nullptr, false);
  const at::Tensor hidden = model_->final_norm(flight.values, store_->table());
  flights_.clear();
  end_step();
  return hidden;
}

at::Tensor Executor::logits(const at::Tensor& hidden) const {
  return at::matmul(hidden, head().value.t()).to(at::kFloat);
}

}  // namespace marrow
