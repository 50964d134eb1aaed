// marrow plan: the pipeline's timeline as a picture.
#include <filesystem>

#include "app/planned_run.h"
#include "base/files.h"
#include "parallel/mesh.h"
#include "pipeline/action_timer.h"
#include "pipeline/layer_placement.h"

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
  std::vector<LayerRange> layers;       // by chunk
  std::vector<int64_t> pipeline_ranks;  // of each rank drawn: those of one pipeline, or all that were measured
  PipelineTimeline timeline;            // seconds
};

// RUN/timeline-00000005, common to the files of a step. `path`: one of them, or the run's folder: its last traced step.
std::string timeline_stem(const std::string& path) {
  MARROW_CHECK(std::filesystem::exists(path), ExitCode::kUsage, Fix("give the run's folder (log.dir)"),
               "--times: {} does not exist", path);
  std::string newest = std::filesystem::is_directory(path) ? "" : path;
  if (newest.empty()) {
    for (const auto& entry : std::filesystem::directory_iterator(path)) {
      const std::string name = entry.path().string();
      if (entry.path().filename().string().starts_with("timeline-") && name > newest) newest = name;
    }
  }
  const size_t end = newest.rfind("-rank-");
  MARROW_CHECK(end != std::string::npos, ExitCode::kUsage,
               Fix("run marrow pretrain with --set 'log.trace=[3]', which writes the timeline of step 3"),
               "--times: {} is or holds no timeline-STEP-rank-RANK.json", path);
  return newest.substr(0, end);
}

std::vector<std::vector<TimedAction>> read_timelines(const std::string& stem, const Plan& plan,
                                                     const PretrainConfig::MeshSizes& mesh) {
  const Fix other_run("give marrow plan the config of the run that was measured, its run.toml");
  std::vector<std::vector<TimedAction>> timelines;
  for (int64_t rank = 0; rank < mesh.world(); ++rank) {
    const std::string path = fmt::format("{}-rank-{:04}.json", stem, rank);
    timelines.push_back(read_timeline(path, mesh_text(mesh)));
    int64_t forwards = 0, outside = 0;
    for (const TimedAction& timed : timelines.back()) {
      if (timed.action.forward) ++forwards;
      for (const PipelinePass& pass : {timed.action.forward, timed.action.backward}) {
        if (pass && (pass.slot >= plan.shape.slots() || pass.micro_batch >= plan.micro_batches)) ++outside;
      }
    }
    const int64_t planned = plan.shape.slots() * plan.micro_batches;
    MARROW_CHECK(forwards == planned && outside == 0, ExitCode::kUsage, other_run,
                 "{} has {} forwards, the plan {} of {} micro-batches in {} chunks", path, forwards, planned,
                 plan.micro_batches, plan.shape.slots());
  }
  return timelines;
}

Plan make_plan(const CommandLine& args) {
  const auto [config, model] = open_planned_run(args);
  const auto& mesh = config.mesh;
  const int64_t tokens = config.train.micro_batch * config.data.seq_len / mesh.cp;
  const ModelCosts costs = model_costs(*model, config.data.seq_len, tokens, mesh.ep);
  Plan plan;
  plan.shape = {mesh.schedule, mesh.pp};
  plan.micro_batches = config.train.global_batch / (config.train.micro_batch * mesh.dp * mesh.ep);
  MARROW_CHECK(plan.micro_batches * mesh.pp <= 1 << 16, ExitCode::kUsage,
               Fix("set train.global_batch to {}: further micro-batches repeat the middle",
                   4 * mesh.pp * config.train.micro_batch * mesh.dp * mesh.ep),
               "a picture of {} micro-batches on {} pipeline ranks: the most are {} in all", plan.micro_batches,
               mesh.pp, 1 << 16);
  plan.layers = place_layers(plan.shape, costs);
  if (args.has("times")) {
    plan.timeline = sum_up(read_timelines(timeline_stem(args.text("times")), plan, mesh));
    for (int64_t r = 0; r < mesh.world(); ++r) plan.pipeline_ranks.push_back(Mesh(mesh, r).p);
  } else {
    plan.timeline =
        simulate_pipeline(plan.shape, plan.micro_batches, all_pipeline_actions(plan.shape, plan.micro_batches),
                          estimated_times(plan.shape, plan.layers, costs, tokens));
    for (int64_t p = 0; p < mesh.pp; ++p) plan.pipeline_ranks.push_back(p);
  }
  return plan;
}

std::string to_svg(const Plan& plan) {
  const double scale = (kWidth - kLeft - 10) / plan.timeline.makespan;
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {}\" font-family=\"sans-serif\" font-size=\"11\">\n"
      "<text x=\"{}\" y=\"16\" fill=\"#888\">{} ranks, {} micro-batches, {:.3f} s, bubble {:.1f} % (slot 1 is paler)"
      "</text>\n",
      kWidth, kTop + kRow * static_cast<double>(plan.timeline.ranks.size()) + 10, kLeft, plan.timeline.ranks.size(),
      plan.micro_batches, plan.timeline.makespan, 100 * plan.timeline.bubble_share());
  double x = kLeft;
  for (const auto& [kind, colour] : kColours) {  // the legend; rectangles are actions alone
    svg += fmt::format(
        "<circle cx=\"{}\" cy=\"36\" r=\"6\" fill=\"{}\"/><text x=\"{}\" y=\"40\" fill=\"#888\">{}</text>\n", x + 6,
        colour, x + 18, action_name(kind));
    x += 130;
  }
  for (size_t rank = 0; rank < plan.timeline.ranks.size(); ++rank) {
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
          to_text(action), plan.shape.chunk_at(plan.pipeline_ranks[rank], pass.slot), timed.start, timed.end);
      if (width < 14) continue;
      svg += fmt::format("<text x=\"{:.2f}\" y=\"{}\" text-anchor=\"middle\" pointer-events=\"none\">{}</text>\n",
                         left + width / 2, y + 15, pass.micro_batch);
    }
  }
  return svg + "</svg>\n";
}

// An earlier picture may be written over, another file not.
void check_output(const std::string& path) {
  const std::string folder = std::filesystem::absolute(path).parent_path().string();
  MARROW_CHECK(std::filesystem::is_directory(folder), ExitCode::kUsage, Fix("make it: mkdir -p {}", folder),
               "--output: there is no folder {}", folder);
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
  for (size_t rank = 0; rank < plan.timeline.ranks.size(); ++rank) {
    const RankTimeline& line = plan.timeline.ranks[rank];
    const int64_t p = plan.pipeline_ranks[rank];
    const double bubble = line.idle / plan.timeline.makespan;
    std::string layers = p == 0 ? "embedding" : "";
    std::vector<std::array<int64_t, 2>> ranges;
    for (int64_t slot = 0; slot < plan.shape.slots(); ++slot) {
      const LayerRange& range = plan.layers[plan.shape.chunk_at(p, slot)];
      layers += fmt::format("{}{}-{}", layers.empty() ? "" : ", ", range.begin, range.end - 1);
      ranges.push_back({range.begin, range.end - 1});
    }
    if (p == plan.shape.rank_of(plan.shape.chunks() - 1)) layers += ", head";
    text += fmt::format("rank {}: layers {}; bubble {:.1f} %; at most {} chunk forwards live\n", rank, layers,
                        100 * bubble, line.peak_live);
    JsonWriter json;
    json.field("rank", rank, "layers", ranges, "bubble_share", bubble, "peak_live", line.peak_live, "peak_deferred",
               line.peak_deferred, "actions", line.actions.size());
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
                      {"[--times RUN]", "as measured: the run's folder, or a timeline file of a step in it"}},
          .example = "marrow plan run.toml --output plan.svg --set mesh.pp=2",
          .notes =
              "A run writes the timeline of every rank in each step of log.trace; --times draws the last of these\n"
              "steps. Gaps are what ranks waited for each other. Tracing slows a step down a little.\n",
          .run = run_plan};
}

}  // namespace marrow
