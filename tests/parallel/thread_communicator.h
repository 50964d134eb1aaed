// Communicators whose ranks are threads of one process. What arrives is written in wait(), and NaN (or
// −1) until then, so that reading early shows.
#pragma once
#include <gtest/gtest.h>
#include <omp.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <numeric>
#include <thread>

#include "base/error.h"
#include "parallel/communicator.h"

namespace marrow::test {

// Messages among the ranks of a group, in order of sending.
class ThreadMail {
 public:
  explicit ThreadMail(int64_t size) : size_(size), channels_(static_cast<size_t>(size * size)) {}
  int64_t size() const { return size_; }

  void send(int64_t from, int64_t to, const at::Tensor& values) {
    at::Tensor copy = values.detach().clone();
    const std::lock_guard lock(mutex_);
    channels_[from * size_ + to].messages.push_back(std::move(copy));
    changed_.notify_all();
  }
  int64_t expect(int64_t from, int64_t to) {
    const std::lock_guard lock(mutex_);
    return channels_[from * size_ + to].expected++;
  }
  at::Tensor take(int64_t from, int64_t to, int64_t number) {
    std::unique_lock lock(mutex_);
    std::vector<at::Tensor>& messages = channels_[from * size_ + to].messages;
    const bool came = changed_.wait_for(lock, std::chrono::seconds(60),
                                        [&] { return failed_ || static_cast<int64_t>(messages.size()) > number; });
    MARROW_CHECK(came && !failed_, ExitCode::kDeviceFault, Fix("call the same operations on every rank"),
                 "rank {} waits for message {} of rank {}", to, number, from);
    return std::exchange(messages[number], at::Tensor());
  }
  void fail() {  // ends the other ranks' waiting
    const std::lock_guard lock(mutex_);
    failed_ = true;
    changed_.notify_all();
  }

 private:
  struct Channel {
    std::vector<at::Tensor> messages;
    int64_t expected = 0;
  };
  int64_t size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Channel> channels_;  // [from, to]
  bool failed_ = false;
};

class ThreadCommunicator final : public Communicator {
 public:
  ThreadCommunicator(std::shared_ptr<ThreadMail> mail, int64_t rank)
      : Communicator("threads", all_ranks(mail->size()), rank), mail_(std::move(mail)) {}

  PendingTransfer start(const Operation& operation) override {
    const auto& [kind, sent, received, sent_parts, received_parts, to, from] = operation;
    switch (kind) {
      case Operation::kAllReduce:
        return everyone(std::vector<at::Tensor>(size(), sent), {sent},
                        [values = sent](const std::vector<at::Tensor>& all) { values.copy_(sum(all)); });
      case Operation::kAllGather: {
        const std::vector<at::Tensor> ranges = split(sent, sent_parts);
        return everyone(std::vector<at::Tensor>(size(), ranges[rank_]), {sent}, copier(ranges));
      }
      case Operation::kReduceScatter: {
        const std::vector<at::Tensor> ranges = split(sent, sent_parts);
        return everyone(ranges, {sent},
                        [own = ranges[rank_]](const std::vector<at::Tensor>& all) { own.copy_(sum(all)); });
      }
      case Operation::kAllToAll:
        return everyone(rows(sent, sent_parts), {received}, copier(rows(received, received_parts)));
      default:
        if (sent.defined()) mail_->send(rank_, to, sent);
        if (!received.defined()) return {[] {}, {sent}};
        undefine(received);
        return {[this, values = received, source = from, number = mail_->expect(from, rank_)] {
                  values.copy_(take(source, number, values.sizes()));
                },
                {received}};
    }
  }

 private:
  using Arrived = std::function<void(const std::vector<at::Tensor>&)>;

  // Sends a tensor to each rank; `arrived` gets those of all ranks.
  PendingTransfer everyone(const std::vector<at::Tensor>& to_rank, std::vector<at::Tensor> written, Arrived arrived) {
    std::vector<int64_t> numbers;
    for (int64_t r = 0; r < size(); ++r) {
      mail_->send(rank_, r, to_rank[r]);
      numbers.push_back(mail_->expect(r, rank_));
    }
    for (const at::Tensor& tensor : written) undefine(tensor);
    return {[=, this, arrived = std::move(arrived)] {
              std::vector<at::Tensor> all;
              for (int64_t r = 0; r < size(); ++r) all.push_back(mail_->take(r, rank_, numbers[r]));
              arrived(all);
            },
            std::move(written)};
  }
  at::Tensor take(int64_t from, int64_t number, at::IntArrayRef sizes) {
    at::Tensor values = mail_->take(from, rank_, number);
    MARROW_CHECK(values.sizes() == sizes, ExitCode::kDeviceFault, Fix("send what the other rank expects"),
                 "rank {} sent {}, rank {} expects {}", from, c10::str(values.sizes()), rank_, c10::str(sizes));
    return values;
  }
  static void undefine(const at::Tensor& values) {
    if (values.is_floating_point()) {
      values.fill_(std::numeric_limits<float>::quiet_NaN());
    } else {
      values.fill_(-1);
    }
  }
  static at::Tensor sum(const std::vector<at::Tensor>& all) {
    at::Tensor total = all[0];
    for (size_t r = 1; r < all.size(); ++r) total = total + all[r];
    return total;
  }
  static std::vector<at::Tensor> split(const at::Tensor& whole, std::span<const int64_t> bounds) {
    std::vector<at::Tensor> ranges;
    for (size_t r = 0; r + 1 < bounds.size(); ++r) ranges.push_back(whole.slice(0, bounds[r], bounds[r + 1]));
    return ranges;
  }
  static Arrived copier(std::vector<at::Tensor> targets) {
    return [targets = std::move(targets)](const std::vector<at::Tensor>& all) {
      for (size_t r = 0; r < all.size(); ++r) targets[r].copy_(all[r]);
    };
  }

  static std::vector<at::Tensor> rows(const at::Tensor& values, std::span<const int64_t> counts) {
    return values.split_with_sizes(at::IntArrayRef(counts.data(), counts.size()));
  }
  static std::vector<int64_t> all_ranks(int64_t size) {
    std::vector<int64_t> ranks(static_cast<size_t>(size));
    std::iota(ranks.begin(), ranks.end(), int64_t{0});
    return ranks;
  }

  std::shared_ptr<ThreadMail> mail_;
};

// Runs body(communicator) on a thread for each rank. An error of one rank ends all and fails the test.
template <typename Body>
void run_ranks(int64_t ranks, const Body& body) {
  const auto mail = std::make_shared<ThreadMail>(ranks);
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      omp_set_num_threads(1);
      // Backward on this thread, also on a GPU: one thread for all ranks would wait for itself.
      c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
      try {
        ThreadCommunicator communicator(mail, rank);
        body(communicator);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << " of " << ranks << ": " << error.what();
        mail->fail();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace marrow::test
