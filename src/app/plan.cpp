// marrow plan: the pipeline's timeline as a picture.
#include <filesystem>

#include "app/planned_run.h"
#include "app/subcommands.h"
#include "base/files.h"
#include "pipeline/layer_placement.h"
#include "train/pretrain_loop.h"

namespace marrow {
namespace {

constexpr double kWidth = 1600, kRow = 26, kLeft = 70, kTop = 56;
constexpr std::pair<ActionKind, const char*> kColours[] = {{ActionKind::kForward, "#4a90d9"},
                                                           {ActionKind::kBackward, "#e0812e"},
                                                           {ActionKind::kBackwardInput, "#e9b44c"},
                                                           {ActionKind::kWeightGrad, "#7fb069"},
                                                           {ActionKind::kForwardBackward, "#8e6bbf"}};

struct Plan {
  PipelineShape shape;
  int64_t micro_batches = 0;
  std::vector<LayerRange> layers;  // by chunk
  PipelineTimes times;             // seconds
  PipelineTimeline timeline;
};

// {"forward": [SECONDS by chunk], …, "pair": […], "latency": SECONDS}
PipelineTimes read_times(const std::string& path, const PipelineShape& shape) {
  MARROW_CHECK(std::filesystem::exists(path), ExitCode::kUsage, Fix("see marrow plan --help for the format of --times"),
               "{} does not exist", path);
  const Json json = Json::read_file(path);
  PipelineTimes times{std::vector<ChunkTimes>(shape.chunks(), ChunkTimes{0, 0, 0, 0, 0}), json.double_or("latency", 0)};
  const auto read = [&](ActionKind kind, double ChunkTimes::*time) {
    const std::string key = action_name(kind);
    if (!json.has(key)) return;
    const Json list = json.at(key);
    MARROW_CHECK(static_cast<int64_t>(list.size()) == shape.chunks(), ExitCode::kBadInput,
                 Fix("use the times of a run with the same mesh.pp and mesh.schedule"),
                 "{}: {} has {} times; this pipeline has {} chunks", path, key, list.size(), shape.chunks());
    for (size_t i = 0; i < list.size(); ++i) times.chunks[i].*time = list.at(i).as_double();
  };
  read(ActionKind::kForward, &ChunkTimes::forward);
  read(ActionKind::kBackward, &ChunkTimes::backward);
  read(ActionKind::kBackwardInput, &ChunkTimes::backward_input);
  read(ActionKind::kWeightGrad, &ChunkTimes::weight_grad);
  read(ActionKind::kForwardBackward, &ChunkTimes::pair);
  return times;
}

Plan make_plan(const CommandLine& args) {
  const PretrainConfig config = read_planned_config(args);
  const auto& mesh = config.mesh;
  const auto model = open_model(Json::read_file(config.model.config, ExitCode::kUsage));
  check_model_fits(config, model->shape());
  const ModelCosts costs =
      model_costs(*model, config.data.seq_len, config.train.micro_batch * config.data.seq_len / mesh.cp, mesh.ep);
  Plan plan;
  plan.shape = {mesh.schedule, mesh.pp};
  plan.micro_batches = config.train.global_batch / (config.train.micro_batch * mesh.dp * mesh.ep);
  plan.layers = place_layers(plan.shape, costs);
  plan.times = args.has("times") ? read_times(args.text("times"), plan.shape)
                                 : estimated_times(plan.shape, plan.layers, costs,
                                                   config.train.micro_batch * config.data.seq_len / mesh.cp);
  const RankActions actions = all_pipeline_actions(plan.shape, plan.micro_batches);
  for (int64_t rank = 0; rank < mesh.pp; ++rank) {
    for (const PipelineAction& action : actions[rank]) {
      MARROW_CHECK(action_time(plan.times, plan.shape, rank, action) > 0, ExitCode::kBadInput,
                   Fix("add the seconds of every kind of action, by chunk: marrow plan --help"),
                   "{} has no time of {} on pipeline rank {}", args.text("times"), to_text(action), rank);
    }
  }
  plan.timeline = simulate_pipeline(plan.shape, plan.micro_batches, actions, plan.times);
  return plan;
}

std::string to_svg(const Plan& plan) {
  const double scale = (kWidth - kLeft - 10) / plan.timeline.makespan;
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {}\" font-family=\"sans-serif\" font-size=\"11\">\n"
      "<text x=\"{}\" y=\"16\" fill=\"#888\">{} ranks, {} micro-batches, {:.3f} s, bubble {:.1f} % (slot 1 is paler)"
      "</text>\n",
      kWidth, kTop + kRow * static_cast<double>(plan.shape.pp) + 10, kLeft, plan.shape.pp, plan.micro_batches,
      plan.timeline.makespan, 100 * plan.timeline.bubble_share());
  double x = kLeft;
  for (const auto& [kind, colour] : kColours) {  // the legend; rectangles are actions alone
    svg += fmt::format(
        "<circle cx=\"{}\" cy=\"36\" r=\"6\" fill=\"{}\"/><text x=\"{}\" y=\"40\" fill=\"#888\">{}</text>\n", x + 6,
        colour, x + 18, action_name(kind));
    x += 130;
  }
  for (int64_t rank = 0; rank < plan.shape.pp; ++rank) {
    const double y = kTop + kRow * static_cast<double>(rank);
    svg += fmt::format("<text x=\"4\" y=\"{}\" fill=\"#888\">rank {}</text>\n", y + 16, rank);
    for (const TimedAction& timed : plan.timeline.ranks[rank].actions) {
      const PipelineAction& action = timed.action;
      const PipelinePass& pass = action.forward ? action.forward : action.backward;
      const double left = kLeft + timed.start * scale, width = (timed.end - timed.start) * scale;
      svg += fmt::format(
          "<rect x=\"{:.2f}\" y=\"{}\" width=\"{:.2f}\" height=\"{}\" fill=\"{}\" fill-opacity=\"{}\" stroke=\"#fff\" "
          "stroke-width=\"0.5\"><title>rank {}: {}, chunk {}, {:.6f} to {:.6f} s</title></rect>\n",
          left, y, width, kRow - 4, kColours[static_cast<size_t>(action.kind)].second, pass.slot == 0 ? 1 : 0.6, rank,
          to_text(action), plan.shape.chunk_at(rank, pass.slot), timed.start, timed.end);
      if (width < 14) continue;
      svg += fmt::format("<text x=\"{:.2f}\" y=\"{}\" text-anchor=\"middle\" pointer-events=\"none\">{}</text>\n",
                         left + width / 2, y + 15, pass.micro_batch);
    }
  }
  return svg + "</svg>\n";
}

// An earlier picture may be written over, another file not.
void check_output(const std::string& path) {
  if (!std::filesystem::exists(path)) return;
  MARROW_CHECK(std::filesystem::is_regular_file(path) && read_text_file(path).starts_with("<svg "), ExitCode::kUsage,
               Fix("give --output another path, or remove " + path), "{} exists and is no picture of marrow plan",
               path);
}

int run_plan(const CommandLine& args) {
  check_output(args.text("output"));
  const Plan plan = make_plan(args);
  write_text_file_atomically(args.text("output"), to_svg(plan));
  size_t actions = 0;
  std::string text, ranks;
  for (int64_t rank = 0; rank < plan.shape.pp; ++rank) {
    const RankTimeline& line = plan.timeline.ranks[rank];
    const double bubble = line.idle / plan.timeline.makespan;
    std::string layers, layers_json;
    for (int64_t slot = 0; slot < plan.shape.slots(); ++slot) {
      const LayerRange& range = plan.layers[plan.shape.chunk_at(rank, slot)];
      layers += fmt::format("{}{}-{}", slot == 0 ? "" : ", ", range.begin, range.end - 1);
      layers_json += fmt::format("{}[{}, {}]", slot == 0 ? "" : ", ", range.begin, range.end - 1);
    }
    if (rank == 0) layers = "embedding, " + layers;
    if (rank == plan.shape.rank_of(plan.shape.chunks() - 1)) layers += ", head";
    text += fmt::format("rank {}: layers {}; bubble {:.1f} %; at most {} chunk forwards live\n", rank, layers,
                        100 * bubble, line.peak_live);
    JsonWriter json;
    json.field("rank", rank).raw("layers", "[" + layers_json + "]");
    json.field("bubble_share", bubble, "peak_live", line.peak_live, "peak_deferred", line.peak_deferred, "actions",
               line.actions.size());
    ranks += (rank == 0 ? "" : ", ") + json.text();
    actions += line.actions.size();
  }
  const char* source = args.has("times") ? "measured" : "estimated for H200s";
  text += fmt::format("{}: {} actions, {:.3f} s a step ({}), bubble {:.1f} %", args.text("output"), actions,
                      plan.timeline.makespan, source, 100 * plan.timeline.bubble_share());
  JsonWriter json;
  json.field("output", args.text("output"), "times", source, "micro_batches", plan.micro_batches, "seconds",
             plan.timeline.makespan, "bubble_share", plan.timeline.bubble_share(), "actions", actions);
  args.print(text, json.raw("ranks", "[" + ranks + "]"));
  return 0;
}

}  // namespace

Subcommand plan_command() {
  return {.name = "plan",
          .summary = "the pipeline's timeline as a picture: layers, bubble and live activations of each rank",
          .positionals = {"RUN.toml"},
          .options = {{"--output SVG", "where the picture goes"},
                      {"[--set KEY=VALUE]...", "overrides a key, for example mesh.pp=4"},
                      {"[--processes N]", "of the run, where [mesh] leaves a size open"},
                      {"[--times TIMES.json]", "measured seconds instead of estimates"}},
          .example = "marrow plan run.toml --output plan.svg --set mesh.pp=2",
          .notes =
              "TIMES.json: {\"forward\": [0.01, ...], \"backward\": [...], \"backward_input\": [...],\n"
              "\"weight_grad\": [...], \"pair\": [...], \"latency\": 0}: seconds of one action by chunk, in the\n"
              "model's order; pair: of this chunk's forward with a backward of the rank's other chunk.\n",
          .run = run_plan};
}

}  // namespace marrow
